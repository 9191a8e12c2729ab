"""Types that converters name in their signatures."""


class Tensor: ...


class TensorSpec: ...


class DataType: ...
