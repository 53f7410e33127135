"""A program, or a recorded step, as text, HTML page and SVG drawing.

listing        lines, parameters and collectives of one rank: what all renderers draw
text, html, svg   the renderers
dump           a program on disk after each pass
inside_ops     collectives inside an op
colours        one colour a kind of collective
"""
