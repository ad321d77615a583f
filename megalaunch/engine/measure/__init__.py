"""What a step cost."""
