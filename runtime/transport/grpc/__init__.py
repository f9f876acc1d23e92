"""Tensors over gRPC: ``bytes`` is the fair baseline, ``proto`` what TensorFlow does."""

import os

# Otherwise gRPC's core reports every orderly close of a peer on stderr. Read when gRPC is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
