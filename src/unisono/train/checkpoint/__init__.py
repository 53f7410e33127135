"""Checkpoints that any plan can load.

    checkpoints    Checkpoints: save, wait, load, newest_good
    in_memory      MemoryCheckpoints: the same in the memory of the hosts, for restarts
    inventory      what a rank saves: tensors by name, and the rest as JSON; chunks: shards as boxes of full tensors
    saving         one save: staging, writing, publishing; chunk_files: by torch's distributed checkpoint
    folder_lock    FolderLock: one job writes to a folder
    dcp_planners   what each rank writes, and which stored chunks it reads where another plan shards otherwise
    manifest       the index of a checkpoint, with checksums
    restoring      loads a checkpoint under this plan
    weights        export_weights, import_weights: safetensors files and state_dicts

Called by `train.fit`, Engine and scripts.
"""
