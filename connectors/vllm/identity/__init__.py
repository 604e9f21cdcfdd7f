"""What an engine's block keys depend on: its configuration, files, weights and inputs."""
