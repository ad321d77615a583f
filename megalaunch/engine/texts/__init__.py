"""Text and its figures by a model that lies over workers: what they are asked, and how they answer."""
