"""Where other libraries plug in: transformers, Lightning, Accelerate, loggers, exporters; imported lazily."""
