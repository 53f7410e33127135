"""One colour a kind of collective, for text, pages and drawings alike; each reads on white and on black."""

COLOURS = {
    "all_reduce": "#d9480f",
    "reduce_scatter": "#2f9e44",
    "all_gather": "#1c7ed6",
    "all_to_all": "#9c36b5",
    "send": "#c2255c",
    "recv": "#c2255c",
    "slice": "#868e96",
    "pad": "#868e96",
    "assign": "#868e96",
}
OTHER = "#868e96"


def colour_of(kind: str) -> str:
    return COLOURS.get(kind, OTHER)
