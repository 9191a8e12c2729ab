"""TaskD's roles in a PyTorch job, played by our own parts; `mindspeed_tft.names` offers them under TaskD's names.

    role      TaskD's duty                      here
    manager   decides; talks to the cluster     keeps the job's controller (`manager`)
    proxy     passes words on, one a node       keeps the node's relay (`proxy`)
    agent     starts and ends worker processes  torchrun with our patches (`torchrun`); under msrun: `agent`
    worker    acts in a training process        the processor of that process (`worker`)

Nothing of this is imported by a job that does not ask for it by one of these names.
"""
