"""The plugin for vLLM. Its modules but `register` import vLLM, so nothing else of the package imports them."""
