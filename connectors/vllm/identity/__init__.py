"""What names an engine's blocks: what it was given, its files, its weights, its inputs."""
