"""The SGLang extension and the ways to start a server with it. Nothing happens at import."""
