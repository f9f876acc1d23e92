"""Tensors over gRPC: ``bytes`` is the fair baseline, ``proto`` what TensorFlow does."""

import os

# As the control plane's (``runtime/cluster/rpc.py``), whichever is imported first: what goes wrong is ours to report, in one line.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
