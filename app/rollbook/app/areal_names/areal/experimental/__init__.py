"""See the package `areal`."""
