"""The composition root: settings, command line, launchers, demo. The only room that knows all the others."""
