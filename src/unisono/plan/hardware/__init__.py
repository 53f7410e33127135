"""Machines: `spec` (Hardware, Link, curves), `toml` (files), and the files of known machines in machines/."""
