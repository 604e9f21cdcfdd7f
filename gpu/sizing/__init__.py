"""Groups of layers, other resources that a model keeps, and the division of memory among them."""
