"""The memory of K and V: finds blocks of memory for the tokens of sequences, and shares them."""
