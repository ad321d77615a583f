"""Text for people, without a dependency: numbers with their units, and aligned tables."""
