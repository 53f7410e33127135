"""Other systems' names over unisono's parts, so that their programs run as they are (`unisono run --as NAME`).

aliases     which import name stands for which package, in ranks only
language    errors in the language of the user's locale
mindspore   MindSpore's documented names
torch       torch programs for GPUs, on machines without them (`unisono run --compat torch`)
vqnet       VQNet's documented names; vqnetrun is its launcher
paddle      Paddle's documented names
"""
