"""What a level knows of its blocks: where they are, in which order they go, when they expire."""
