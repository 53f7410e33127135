"""The programs of the documents as rows of a table (tests/compat/documents.py).

texts        the documents' texts, programs cut from them, runs, and what a row is
vqnet        000: VQNet's distributed module
pytorch      001 and 004: torch.distributed, DDP
paddle       002: manual, semi-automatic and static parallelism
mindspore    003: sharding propagation
"""
