"""Random-weight models that must answer as schemas and tools say."""
