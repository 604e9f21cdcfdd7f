"""The live shadow: what each level would bring at other sizes, measured while the cache runs."""
