"""Says where each rank is, and the sizes that its balancer starts from."""

import socket

import horovod.torch as hvd

import loft_hvd as loft

hvd.init()
balancer = loft.Balancer(24)
sizes = ",".join(map(str, balancer.plan.sizes))
print(f"placed {hvd.rank()} on {socket.gethostname()} from {sizes}", flush=True)
hvd.shutdown()
