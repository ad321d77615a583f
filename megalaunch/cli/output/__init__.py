"""What the commands print: findings, tables, progress."""
