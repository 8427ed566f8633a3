#include "whale_ops/core/compute/processor.h"

#include <cstdlib>
#include <string>

namespace whale {
namespace {

ProcessorCode find_cap() {
  const char* given = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (given == nullptr) given = std::getenv("DNNL_MAX_CPU_ISA");
  const std::string name = given != nullptr ? given : "";
  if (name == "SSE41" || name == "AVX") return ProcessorCode::kAnywhere;
  return name.compare(0, 4, "AVX2") == 0 ? ProcessorCode::kAvx2 : ProcessorCode::kAvx512;
}

}  // namespace

std::vector<ProcessorCode> processor_codes() {
  std::vector<ProcessorCode> found;
#if defined(__x86_64__)
  const ProcessorCode cap = find_cap();
  if (cap == ProcessorCode::kAvx512 && __builtin_cpu_supports("avx512f"))
    found.push_back(ProcessorCode::kAvx512);
  if (cap != ProcessorCode::kAnywhere && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma"))
    found.push_back(ProcessorCode::kAvx2);
#endif
  found.push_back(ProcessorCode::kAnywhere);
  return found;
}

}  // namespace whale
