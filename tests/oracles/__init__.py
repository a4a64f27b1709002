"""The methods' definitions as loops, and the cases to check. Nothing here calls the library's attention or pooling."""
