"""Wire formats: what comes in, validated; what goes out, as dictionaries."""
