"""Every test runs with the shipped plugin, whether or not kvladder is installed."""

pytest_plugins = ["kvladder.testing.plugin"]
