"""Everything that an engine's block keys depend on: configuration, files, weights and inputs."""
