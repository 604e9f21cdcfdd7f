"""Settings: reads, checks and explains them, and finds the classes that they name."""
