"""An HTTP server for a model, with the interface of OpenAI's completions and chat completions."""
