"""Agents: any object with `async run`, run many at once against the proxy, rewarded, one failure alone."""
