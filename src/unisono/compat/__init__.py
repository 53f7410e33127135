"""Other systems' names over unisono's parts, so that their programs run after changing the imports."""
