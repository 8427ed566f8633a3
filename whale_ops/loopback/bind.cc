// Preloaded into mpirun if all ranks are on one host: sockets that mpirun would bind to all
// addresses are bound to loopback. PRRTE 3, which comes with Open MPI 5.0, has no parameter for
// that.
//
// It does nothing unless WHALE_LOOPBACK is in the environment, from which workers remove it
// (whale/launcher/worker.py).

#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace {

using Bind = int (*)(int, const sockaddr*, socklen_t);

int bind_v6(Bind original, int socket, sockaddr_in6 address) {
  const auto* const any = reinterpret_cast<const sockaddr*>(&address);
  address.sin6_addr = in6addr_loopback;
  const int result = original(socket, any, sizeof address);
  if (result == 0 || errno != EADDRNOTAVAIL) return result;
  // For a host with IPv6 sockets but without ::1: binds to ::ffff:127.0.0.1, which needs a socket
  // that takes both families.
  const int off = 0;
  setsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  const uint32_t mapped[4] = {0, 0, htonl(0xffff), htonl(INADDR_LOOPBACK)};
  std::memcpy(&address.sin6_addr, mapped, sizeof mapped);
  return original(socket, any, sizeof address);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int bind(int socket, const sockaddr* address,
                                                           socklen_t size) noexcept {
  // Looked up at each call: a static local variable would need the C++ library in every program
  // into which this library is loaded.
  const auto original = reinterpret_cast<Bind>(dlsym(RTLD_NEXT, "bind"));
  if (std::getenv("WHALE_LOOPBACK") == nullptr || address == nullptr)
    return original(socket, address, size);
  if (address->sa_family == AF_INET && size >= sizeof(sockaddr_in)) {
    sockaddr_in own;
    std::memcpy(&own, address, sizeof own);
    if (own.sin_addr.s_addr == htonl(INADDR_ANY)) own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return original(socket, reinterpret_cast<const sockaddr*>(&own), sizeof own);
  }
  if (address->sa_family == AF_INET6 && size >= sizeof(sockaddr_in6)) {
    sockaddr_in6 own;
    std::memcpy(&own, address, sizeof own);
    if (IN6_IS_ADDR_UNSPECIFIED(&own.sin6_addr)) return bind_v6(original, socket, own);
  }
  return original(socket, address, size);
}
