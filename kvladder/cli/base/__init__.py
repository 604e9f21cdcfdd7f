"""How commands are declared: from functions to arguments, completion and the reference page."""
