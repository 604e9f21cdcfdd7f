"""Spans of OpenTelemetry for fetches and saves, and where they go."""
