// A store of objects for tests, as TensorFlow sees S3 and Google Cloud Storage:
// objects://bucket/key.
//
// Objects are files of one folder, which OBJECT_STORE names; all processes see them. As in such
// stores, an object is there, whole, once its writer has closed it; nothing can be appended; a
// folder is no more than a common beginning of keys; renaming copies and deletes one object, and
// does nothing to folders.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "tensorflow/c/experimental/filesystem/filesystem_interface.h"
#include "tensorflow/c/tf_status.h"

namespace {

namespace fs = std::filesystem;

const fs::path& Root() {
  static const fs::path* const root = [] {
    const char* named = std::getenv("OBJECT_STORE");
    return new fs::path(named == nullptr ? "/nonexistent" : named);
  }();
  return *root;
}

// The key of a URI, without a slash at its end.
std::string KeyOf(const char* uri) {
  std::string key(uri);
  const std::string::size_type scheme = key.find("://");
  if (scheme != std::string::npos) key = key.substr(scheme + 3);
  while (!key.empty() && key.back() == '/') key.pop_back();
  return key;
}

std::string Escaped(const std::string& key) {
  std::string name;
  for (const char c : key)
    name += c == '/' ? std::string("%2F") : c == '%' ? std::string("%25") : std::string(1, c);
  return name;
}

std::string Unescaped(const std::string& name) {
  std::string key;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] != '%') {
      key += name[i];
      continue;
    }
    key += name.compare(i, 3, "%2F") == 0 ? '/' : '%';
    i += 2;
  }
  return key;
}

fs::path FileOf(const char* uri) { return Root() / Escaped(KeyOf(uri)); }

bool IsObject(const char* uri) {
  std::error_code ignored;
  return fs::is_regular_file(FileOf(uri), ignored);
}

// The keys that begin with a folder's name, without it.
std::vector<std::string> KeysIn(const char* uri) {
  const std::string begin = KeyOf(uri) + "/";
  std::vector<std::string> found;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(Root(), ignored)) {
    const std::string key = Unescaped(entry.path().filename().string());
    if (key.compare(0, begin.size(), begin) == 0) found.push_back(key.substr(begin.size()));
  }
  return found;
}

void Put(const std::string& content, const fs::path& file, TF_Status* status) {
  const fs::path beside = Root() / ("~" + std::to_string(getpid()) + file.filename().string());
  std::ofstream(beside, std::ios::binary) << content;
  std::error_code error;
  fs::rename(beside, file, error);
  TF_SetStatus(status, error ? TF_INTERNAL : TF_OK, error.message().c_str());
}

std::string Get(const fs::path& file) {
  std::ostringstream content;
  content << std::ifstream(file, std::ios::binary).rdbuf();
  return content.str();
}

bool Missing(const char* uri, TF_Status* status) {
  if (IsObject(uri)) return false;
  TF_SetStatus(status, TF_NOT_FOUND, (std::string("no such object: ") + uri).c_str());
  return true;
}

struct Writing {
  fs::path file;
  std::string content;
};

void OpenForReading(const TF_Filesystem*, const char* path, TF_RandomAccessFile* file,
                    TF_Status* status) {
  if (Missing(path, status)) return;
  file->plugin_file = new std::string(Get(FileOf(path)));
  TF_SetStatus(status, TF_OK, "");
}

int64_t Read(const TF_RandomAccessFile* file, uint64_t offset, size_t n, char* buffer,
             TF_Status* status) {
  const auto& content = *static_cast<std::string*>(file->plugin_file);
  const size_t count =
      offset >= content.size() ? 0 : std::min(n, content.size() - static_cast<size_t>(offset));
  std::memcpy(buffer, content.data() + offset, count);
  TF_SetStatus(status, count < n ? TF_OUT_OF_RANGE : TF_OK, count < n ? "end of the object" : "");
  return static_cast<int64_t>(count);
}

void OpenForWriting(const TF_Filesystem*, const char* path, TF_WritableFile* file,
                    TF_Status* status) {
  file->plugin_file = new Writing{FileOf(path), ""};
  TF_SetStatus(status, TF_OK, "");
}

void Append(const TF_WritableFile* file, const char* buffer, size_t n, TF_Status* status) {
  static_cast<Writing*>(file->plugin_file)->content.append(buffer, n);
  TF_SetStatus(status, TF_OK, "");
}

int64_t Tell(const TF_WritableFile* file, TF_Status* status) {
  TF_SetStatus(status, TF_OK, "");
  return static_cast<int64_t>(static_cast<Writing*>(file->plugin_file)->content.size());
}

void Ignore(const TF_WritableFile*, TF_Status* status) { TF_SetStatus(status, TF_OK, ""); }

void Close(const TF_WritableFile* file, TF_Status* status) {
  const auto* writing = static_cast<Writing*>(file->plugin_file);
  Put(writing->content, writing->file, status);
}

void MakeNoFolder(const TF_Filesystem*, const char*, TF_Status* status) {
  TF_SetStatus(status, TF_OK, "");
}

void DeleteObject(const TF_Filesystem*, const char* path, TF_Status* status) {
  if (Missing(path, status)) return;
  fs::remove(FileOf(path));
  TF_SetStatus(status, TF_OK, "");
}

void CopyObject(const TF_Filesystem*, const char* from, const char* to, TF_Status* status) {
  if (!Missing(from, status)) Put(Get(FileOf(from)), FileOf(to), status);
}

void RenameObject(const TF_Filesystem* filesystem, const char* from, const char* to,
                  TF_Status* status) {
  CopyObject(filesystem, from, to, status);
  if (TF_GetCode(status) == TF_OK) DeleteObject(filesystem, from, status);
}

bool IsFolder(const TF_Filesystem*, const char* path, TF_Status* status) {
  const bool is = !KeysIn(path).empty();
  TF_SetStatus(status, is ? TF_OK : IsObject(path) ? TF_FAILED_PRECONDITION : TF_NOT_FOUND, path);
  return is;
}

void Exists(const TF_Filesystem*, const char* path, TF_Status* status) {
  const bool is = IsObject(path) || !KeysIn(path).empty();
  TF_SetStatus(status, is ? TF_OK : TF_NOT_FOUND, path);
}

void Stat(const TF_Filesystem*, const char* path, TF_FileStatistics* found, TF_Status* status) {
  struct stat facts;
  const bool is_object = IsObject(path) && stat(FileOf(path).c_str(), &facts) == 0;
  if (!is_object && KeysIn(path).empty()) return TF_SetStatus(status, TF_NOT_FOUND, path);
  found->length = is_object ? facts.st_size : 0;
  found->mtime_nsec = is_object ? facts.st_mtim.tv_sec * 1000000000LL + facts.st_mtim.tv_nsec : 0;
  found->is_directory = !is_object;
  TF_SetStatus(status, TF_OK, "");
}

int64_t Size(const TF_Filesystem* filesystem, const char* path, TF_Status* status) {
  TF_FileStatistics found;
  Stat(filesystem, path, &found, status);
  return TF_GetCode(status) == TF_OK ? found.length : -1;
}

char* Copied(const std::string& text) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

char* KeepUri(const TF_Filesystem*, const char* uri) { return Copied(uri); }

int List(const TF_Filesystem*, const char* path, char*** entries, TF_Status* status) {
  std::set<std::string> names;
  for (const std::string& key : KeysIn(path)) {
    const std::string::size_type end = key.find('/');
    names.insert(end == std::string::npos ? key : key.substr(0, end + 1));
  }
  if (names.empty()) {
    TF_SetStatus(status, TF_NOT_FOUND, path);
    return -1;
  }
  *entries = static_cast<char**>(std::malloc(names.size() * sizeof(char*)));
  int count = 0;
  for (const std::string& name : names) (*entries)[count++] = Copied(name);
  TF_SetStatus(status, TF_OK, "");
  return count;
}

}  // namespace

extern "C" void TF_InitPlugin(TF_FilesystemPluginInfo* info) {
  info->plugin_memory_allocate = [](size_t size) { return std::calloc(1, size); };
  info->plugin_memory_free = [](void* memory) { std::free(memory); };
  info->num_schemes = 1;
  info->ops = static_cast<TF_FilesystemPluginOps*>(std::calloc(1, sizeof(TF_FilesystemPluginOps)));
  TF_FilesystemPluginOps* const ops = info->ops;
  TF_SetFilesystemVersionMetadata(ops);
  ops->scheme = Copied("objects");
  ops->random_access_file_ops =
      static_cast<TF_RandomAccessFileOps*>(std::calloc(1, TF_RANDOM_ACCESS_FILE_OPS_SIZE));
  ops->random_access_file_ops->cleanup = [](TF_RandomAccessFile* file) {
    delete static_cast<std::string*>(file->plugin_file);
  };
  ops->random_access_file_ops->read = Read;
  ops->writable_file_ops =
      static_cast<TF_WritableFileOps*>(std::calloc(1, TF_WRITABLE_FILE_OPS_SIZE));
  ops->writable_file_ops->cleanup = [](TF_WritableFile* file) {
    delete static_cast<Writing*>(file->plugin_file);
  };
  ops->writable_file_ops->append = Append;
  ops->writable_file_ops->tell = Tell;
  ops->writable_file_ops->flush = Ignore;
  ops->writable_file_ops->sync = Ignore;
  ops->writable_file_ops->close = Close;
  ops->filesystem_ops = static_cast<TF_FilesystemOps*>(std::calloc(1, TF_FILESYSTEM_OPS_SIZE));
  TF_FilesystemOps* const system = ops->filesystem_ops;
  system->init = [](TF_Filesystem*, TF_Status* status) { TF_SetStatus(status, TF_OK, ""); };
  system->cleanup = [](TF_Filesystem*) {};
  system->new_random_access_file = OpenForReading;
  system->new_writable_file = OpenForWriting;
  system->create_dir = MakeNoFolder;
  system->recursively_create_dir = MakeNoFolder;
  system->delete_file = DeleteObject;
  system->delete_dir = MakeNoFolder;
  system->rename_file = RenameObject;
  system->copy_file = CopyObject;
  system->path_exists = Exists;
  system->stat = Stat;
  system->is_directory = IsFolder;
  system->get_file_size = Size;
  system->translate_name = KeepUri;
  system->get_children = List;
}
