"""A store on a port of the loopback interface, until it is killed: store_server.py PORT"""

import sys
import threading

from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
threading.Event().wait(120)
