from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorProto(_message.Message):
    __slots__ = ("dtype", "dims", "tensor_content")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_CONTENT_FIELD_NUMBER: _ClassVar[int]
    dtype: int
    dims: _containers.RepeatedScalarFieldContainer[int]
    tensor_content: bytes
    def __init__(self, dtype: _Optional[int] = ..., dims: _Optional[_Iterable[int]] = ..., tensor_content: _Optional[bytes] = ...) -> None: ...

class RecvTensorRequest(_message.Message):
    __slots__ = ("rendezvous_key",)
    RENDEZVOUS_KEY_FIELD_NUMBER: _ClassVar[int]
    rendezvous_key: str
    def __init__(self, rendezvous_key: _Optional[str] = ...) -> None: ...

class RecvTensorResponse(_message.Message):
    __slots__ = ("tensor",)
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    tensor: TensorProto
    def __init__(self, tensor: _Optional[_Union[TensorProto, _Mapping]] = ...) -> None: ...
