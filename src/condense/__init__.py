"""Condensed attention: far tokens pooled into representatives, near tokens exact, one softmax over both."""
