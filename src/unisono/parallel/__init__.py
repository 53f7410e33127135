"""The strategies, one short file each; `apply` composes them."""
