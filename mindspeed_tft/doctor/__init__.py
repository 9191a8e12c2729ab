"""Preflight: whether the hosts of a job, and the ways between them, are as training with the plugin needs them.

Each check is a function that looks at one thing and returns findings; none of them changes anything that stays. What is
asked of one host is in `software`, `system`, `names`, `storage` and `certificates`; what takes several in `probe` (one
way between two hosts), `peer` (a host that answers), `meeting` (how hosts find each other) and `survey` (who asks them,
and judges). Nothing here needs torch, Megatron or a device. `tftctl doctor` shows what was found.
"""
