"""What a model keeps, and how memory is divided among it."""
