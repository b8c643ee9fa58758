// torch without CUDA has no device guard for it, and Python indexing asks for one: this one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}  // namespace c10::impl
