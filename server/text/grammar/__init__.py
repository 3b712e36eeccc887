"""Compile the required forms of answers to constraints for the engine."""
