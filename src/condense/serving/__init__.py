"""Condensed models inside serving engines: what a method needs of an engine's pages, and the plugin for vLLM."""
