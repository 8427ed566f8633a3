#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/allocator_registry.h"
#include <cstdio>
namespace tensorflow {
struct A : Allocator { std::string Name() override {return "shared";} void* AllocateRaw(size_t a,size_t n) override { void*p=0; posix_memalign(&p,a<64?64:a,n); fprintf(stderr,"alloc %zu\n",n); return p;} void DeallocateRaw(void*p) override {free(p);} };
struct F : AllocatorFactory { Allocator* CreateAllocator() override { return new A; } SubAllocator* CreateSubAllocator(int) override {return nullptr;} };
}
extern "C" const char* name(){ static std::string s; s=tensorflow::cpu_allocator_base()->Name(); return s.c_str(); }
extern "C" void reg(){ tensorflow::AllocatorFactoryRegistry::singleton()->Register("x",1,"shared",1000,new tensorflow::F); }
