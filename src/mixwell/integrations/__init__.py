"""mixwell where users already are: transformers, datasets, Lightning, Accelerate. Each is imported by itself."""
