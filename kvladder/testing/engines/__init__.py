"""The conformance suite for connectors: small engines, scripted faults, and the tests."""
