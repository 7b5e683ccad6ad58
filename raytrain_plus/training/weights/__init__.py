"""The weights that a step changes, whole or in rows: optimizer, masters, averages, buffers."""
