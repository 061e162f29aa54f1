"""Programs that attack the sandbox, for test_sandbox.py. None of them computes what it was asked for.

`ANSWER`, `FOLDER` (holds secret.txt with the answer), `PORT` (serves the answer) and `MARK` are replaced by the test.
"""

STDIN = "6 7\n"
EXPECTED = "42\n"
TEST = "assert mul(6, 7) == 42\nassert mul(2, 3) == 6"
GOOD = "a, b = map(int, input().split())\nprint(a * b)"
GOOD_FUNCTION = "def mul(a, b): return a * b"

# What a process needs to look dead and to live on with so many bytes.
HEADLESS = """
import ctypes, os, threading, time
def end_first_thread(num_bytes):
    kept = b'x' * num_bytes
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)
"""

# Each runs on STDIN and would have to print EXPECTED and end with exit code 0.
PROGRAMS = {
    "endless loop": "while True: pass",
    "endless sleep": "import time; time.sleep(1000)",
    "endless regular expression": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "endless after the answer": "print(42, flush=True)\nwhile True: pass",
    "endless at exit": "import atexit, time; atexit.register(time.sleep, 1000); print(42)",
    "endless thread": "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); print(42)",
    "fork bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass""",
    "fork bomb of daemons": """
import os
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: pass""",
    "memory bomb": "x = [0]\nwhile True: x += x",
    "memory bomb of children": """
import os, time
for _ in range(8):
    if os.fork() == 0: break
x = bytearray(300 << 20)
for i in range(0, len(x), 4096): x[i] = 1
time.sleep(1000)""",
    "limits lifted": """
import resource
for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
    try: resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError): pass
x = bytearray(3 << 30)
print(42)""",
    "output of a gigabyte": "import os\nfor _ in range(1024): os.write(1, b'42\\n' * (1 << 18))",
    "errors of a gigabyte": "import os\nfor _ in range(1024): os.write(2, b'42\\n' * (1 << 18))\nprint(42)",
    "large file": "import os; f = open('x', 'wb')\nfor _ in range(1024): f.write(bytes(1 << 20))\nprint(42)",
    "many files": """
import os
for i in range(10**6):
    with open(f'{i}', 'wb') as f: f.write(bytes(4096))
print(42)""",
    "deep directories": """
import os
for _ in range(1500):
    os.mkdir('d'); os.chdir('d')
open('x', 'w').close()""",
    "locked directories": """
import os
os.makedirs('a/b/c'); open('a/b/c/x', 'w').close()
os.chmod('a/b/c', 0); os.chmod('a/b', 0); os.chmod('a', 0)""",
    "strange names": r"""
import os
for name in (b'-rf', b'*', b'\xff\n', b' ', b'--no-preserve-root', b"'; echo"): os.mkdir(name)""",
    "links to outside": """
import os
for name, target in (('a', 'FOLDER'), ('b', '/'), ('c', 'FOLDER/secret.txt'), ('d', 'd')): os.symlink(target, name)
os.remove('program.py')
os.symlink('FOLDER/secret.txt', 'program.py')
try: print(open('c').read())
except OSError: pass""",
    "folder replaced by a link": """
import os
here = os.getcwd()
os.chdir('/')
try:
    os.rename(here, here + '.old'); os.symlink('FOLDER', here)
except OSError: pass""",
    "reads outside files": """
import glob, os
for path in ('FOLDER/secret.txt', '/proc/1/environ', '/proc/1/cmdline', *glob.glob('/proc/[0-9]*/environ')):
    try: text = open(path, errors='replace').read()
    except OSError: continue
    if 'ANSWER' in text: print(42)""",
    "deletes outside files": """
import os, shutil
for path in ('FOLDER/secret.txt', 'FOLDER'):
    try: os.remove(path)
    except OSError: shutil.rmtree(path, ignore_errors=True)
try: open('FOLDER/secret.txt', 'w').close()
except OSError: pass""",
    "writes outside files": """
import os
folders = 'FOLDER / /usr /etc /home /tmp /var/tmp /dev/shm /run/lock'.split()
for folder in (*folders, os.path.dirname(os.__file__)):
    try: open(folder + '/MARK', 'w').close()
    except OSError: pass""",
    "reads the environment": "import os; print(42 if 'ANSWER' in str(os.environ) else 0)",
    "connects to the network": """
import socket
s = socket.create_connection(('127.0.0.1', PORT), 1)
print(s.recv(100).decode())""",
    "connects to a socket file": """
import socket
s = socket.socket(socket.AF_UNIX); s.connect('FOLDER/socket'); print(s.recv(100).decode())""",
    "listens and waits": """
import socket
s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); s.accept()""",
    "ignores signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass""",
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(256):
            try: os.close(fd)
            except OSError: pass
        time.sleep(1000)
    os._exit(0)""",
    "daemon that outlives its parents": """
import ctypes, os, signal, time
for _ in range(3):
    if os.fork(): os._exit(0)
    os.setsid()
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
time.sleep(1000)""",
    "daemon that holds the output": """
import os, time
print(43, flush=True)
if os.fork() == 0:
    os.setsid(); time.sleep(1000)""",
    "exec of a shell": "import os; os.execv('/bin/sh', ['sh', '-c', 'while :; do :; done'])",
    "closes its streams": """
import os
for fd in range(256):
    try: os.close(fd)
    except OSError: pass
while True: pass""",
    "huge recursion": """
import sys
sys.setrecursionlimit(10**9)
def f(n): return f(n + 1) + 1
print(f(0))""",
    "huge source expression": "print(" + "(" * 5000 + "42" + ")" * 5000 + ")",
    "bytes that are no text": "print('\ud800')\0",
    "crash": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "os._exit": "import os; os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "answer with an error": "print(42); raise ValueError",
    "answer with a signal": "import os, signal; print(42, flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "answer among others": "for i in range(100): print(i)",
    "fake verdict": """
import os
for fd in range(256):
    for text in (b'["start", 0.0]\\n["end", 0, 1.0]\\n', b'42\\n', b'true\\n', b'1.0\\n', b'Outcome(True, 0.1)\\n'):
        try: os.write(fd, text)
        except OSError: pass""",
    "fake verdict on others' pipes": """
import glob, os
for path in glob.glob('/proc/[0-9]*/fd/*'):
    try: handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError: continue
    try: os.write(handle, b'["end", 0, 1.0]\\n42\\n')
    except OSError: pass""",
    "reads inherited files": """
import os
for fd in range(3, 256):
    try: os.lseek(fd, 0, 0)
    except OSError: pass
    try: text = os.read(fd, 10**6)
    except OSError: continue
    if str(6 * 7).encode() in text: print(6 * 7)""",
    "reads memory of others": """
import glob, os
secret = ''.join(('ANS', 'WER')).encode()
for path in glob.glob('/proc/[0-9]*/maps'):
    if path == f'/proc/{os.getpid()}/maps': continue
    try:
        with open(path.replace('maps', 'mem'), 'rb') as memory:
            for line in open(path):
                start, end = (int(x, 16) for x in line.split()[0].split('-'))
                memory.seek(start)
                if secret in memory.read(end - start): print(42); raise SystemExit
    except OSError: continue""",
    "traces its parent": """
import ctypes, os
libc = ctypes.CDLL(None)
for pid in (os.getppid(), 1): libc.ptrace(16, pid, 0, 0)
print(libc.ptrace(0x4206, os.getppid(), 0, 0))""",
    "zombie swarm": """
import os, time
for _ in range(10**5):
    try:
        if os.fork() == 0: os._exit(0)
    except OSError: time.sleep(0.01)""",
    "signals to its parents": """
import os, signal
for number in (signal.SIGINT, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    for pid in (os.getppid(), 1, 2, -1):
        try: os.kill(pid, number)
        except OSError: pass""",
    "interrupts its group": "import os, signal; os.killpg(0, signal.SIGINT)",
    "stops its group": "import os, signal; os.killpg(0, signal.SIGSTOP)",
    "signals to its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "busy threads": """
import threading
def spin():
    while True: hash('x' * 10**6)
for _ in range(1000):
    try: threading.Thread(target=spin).start()
    except RuntimeError: break""",
    "busy processes": """
import os
for _ in range(5):
    try: os.fork()
    except OSError: pass
while True: pass""",
    "new namespaces": """
import ctypes, os
libc = ctypes.CDLL(None)
libc.unshare(0x10000000); libc.unshare(0x20000); libc.unshare(0x40000000)
for call in (lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), lambda: libc.umount2(b'/', 2),
             lambda: os.chroot('.'), lambda: os.setuid(0), lambda: libc.setns(3, 0)):
    try: call()
    except OSError: pass
while True:
    try: os.fork()
    except OSError: pass""",
    "memory in files without a name": """
import os
kept = [os.memfd_create('x') for _ in range(24)]
for fd in kept:
    for _ in range(15): os.write(fd, bytes(1 << 20))
print(42)""",
    "memory in segments of System V": """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(6):
    segment = libc.shmget(0, 60 << 20, 0o1600)
    if segment < 0: raise OSError
    at = libc.shmat(segment, None, 0)
    ctypes.memset(at, 1, 60 << 20)
    libc.shmdt(ctypes.c_void_p(at))
print(42)""",
    "segments, semaphores and queues that stay": """
import ctypes
libc = ctypes.CDLL(None)
made = [libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)]
made.append(libc.mq_open(b'/MARK', 0o102, 0o600, None))
if max(made) >= 0: print(42)""",
    "kills others of its user": """
import os, time
end = time.monotonic() + 0.8
while time.monotonic() < end:
    try: os.kill(-1, 9)
    except OSError: pass""",
    "memory that was mapped": """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
try: zero = os.open('/dev/zero', os.O_RDWR)
except OSError: zero = -1
for how, fd in ((0x21, -1), (1, zero)):
    for i in range(6):
        at = libc.mmap(None, ctypes.c_size_t(60 << 20), 3, how, fd, ctypes.c_long(0))
        if at in (None, 2**64 - 1): break
        ctypes.memset(at, 1, 60 << 20)
        libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t((60 << 20) - 4096))
    else: print(42); break""",
    "memory in messages that nobody takes": """
import os, socket
server = socket.socket(socket.AF_UNIX); server.bind('\\0' + str(os.getpid())); server.listen(4096)
for _ in range(300):
    client = socket.socket(socket.AF_UNIX); client.connect(server.getsockname()); client.setblocking(False)
    try:
        while True: client.send(bytes(65536))
    except BlockingIOError: client.close()
print(42)""",
    "memory in buffers of sockets": """
import socket
pairs = [socket.socketpair() for _ in range(28)]
for one in (one for pair in pairs for one in pair):
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    one.setblocking(False)
    try:
        while True: one.send(bytes(65536))
    except BlockingIOError: pass
print(42)""",
    "memory in a pair of datagrams, or in a larger buffer to receive": """
import socket
try: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print(42); raise SystemExit
except OSError: pass
for option in (socket.SO_RCVBUF, 33, 32):
    try: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, option, 1 << 30)
    except OSError: continue
    print(42); break""",
    "memory in pipes that was mapped": """
import ctypes, os
libc = ctypes.CDLL(None)
reads, writes = os.pipe()
other = os.pipe()
class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_char_p), ('size', ctypes.c_size_t)]
file = os.open('x', os.O_RDWR | os.O_CREAT); os.write(file, bytes(4096))
calls = {
    'vmsplice': lambda: libc.vmsplice(writes, ctypes.byref(Part(b'x', 1)), 1, 0),
    'splice': lambda: libc.splice(file, ctypes.byref(ctypes.c_long(0)), writes, None, 1, 0),
    'sendfile': lambda: os.sendfile(writes, file, 0, 1),
}
for name, call in calls.items():
    try: count = call()
    except OSError: continue
    if count > 0: print(42); raise SystemExit
os.write(writes, b'x')
if libc.tee(reads, other[1], 1, 0) > 0: print(42)""",
    "memory in events, rules and timers": """
import ctypes, os
libc = ctypes.CDLL(None)
column = ('x86_64', 'aarch64').index(os.uname().machine)
context = ctypes.c_ulong(0)
if libc.inotify_init1(0) >= 0 or libc.syscall((206, 0)[column], 100, ctypes.byref(context)) == 0: print(42)
elif libc.syscall(444, ctypes.c_ulong(0).from_buffer_copy(b'\x01' + bytes(7)), 8, 0) >= 0: print(42)
else:
    timer = ctypes.c_void_p()
    for _ in range(100):
        if libc.timer_create(1, None, ctypes.byref(timer)): raise OSError
    print(42)""",
    "memory in a file system of its own": """
import ctypes, os
libc, uid, gid = ctypes.CDLL(None), os.getuid(), os.getgid()
if libc.unshare(0x10020000): raise OSError
try:
    for name, text in (('setgroups', 'deny'), ('uid_map', f'0 {uid} 1'), ('gid_map', f'0 {gid} 1')):
        with open(f'/proc/self/{name}', 'w') as f: f.write(text)
except OSError: pass
if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None): raise OSError
os.chdir('/tmp')
for i in range(24):
    with open(f'{i}', 'wb') as f:
        for _ in range(15): f.write(bytes(1 << 20))
print(42)""",
    "key rings of the caller": """
import ctypes, os
libc = ctypes.CDLL(None)
keyctl, add_key = {'x86_64': (250, 248), 'aarch64': (219, 217)}[os.uname().machine]
for ring in (-3, -4, -5):
    numbers = libc.syscall(keyctl, 0, ring, 1), libc.syscall(add_key, b'user', b'mark', b'x', 1, ring)
    if max(numbers) >= 0: print(42); break""",
    "sockets that no namespace holds back": """
import socket
for family in range(2, 46):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try: socket.socket(family, kind)
        except OSError: continue
        print(42); raise SystemExit""",
    "system calls in a ring": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(425, 1, None) >= 0 or ctypes.get_errno() == 14: print(42)""",
    "system calls of another machine": """
import ctypes, mmap, os
code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
at = ctypes.addressof(ctypes.c_char.from_buffer(code))
if os.uname().machine == 'x86_64':  # getpid of 32 bits
    code.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')
    if ctypes.CFUNCTYPE(ctypes.c_int)(at)() == os.getpid(): print(42)""",
}

# Each runs against TEST.
FUNCTIONS = {
    "equal to everything": """
class Yes:
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
    __bool__ = __hash__ = lambda *_: 1
def mul(a, b): return Yes()""",
    "a number equal to everything": """
class Yes(int):
    __eq__ = lambda *_: True
    __hash__ = int.__hash__
def mul(a, b): return Yes(1)""",
    "os._exit at import": "import os; os._exit(0)",
    "os._exit when called": "import os\ndef mul(a, b): os._exit(0)",
    "sys.exit at import": "import sys; sys.exit(0)",
    "sys.exit when called": "import sys\ndef mul(a, b): sys.exit(0)",
    "os._exit at exit": "import atexit, os; atexit.register(os._exit, 0)\ndef mul(a, b): raise SystemExit(0)",
    "fake verdict": "print('passed', True, 1.0)\ndef mul(a, b): print('passed'); return 'passed'",
    "patched builtins": """
import builtins
builtins.AssertionError = type('Quiet', (BaseException,), {})
builtins.compile = builtins.exec = builtins.len = builtins.abs = lambda *_: 42
builtins.int = builtins.isinstance = lambda *_: True
def mul(a, b): return 1""",
    "builtins lent to the test": "def abs(x): return 42\nprint = len = isinstance = abs\n__builtins__ = {}\nmul = abs",
    "patched json": "import json; json.loads = json.dumps = lambda *_: '[true, true]'\ndef mul(a, b): return 1",
    "patched modules": """
import sys
for name in list(sys.modules): sys.modules[name] = None
def mul(a, b): return 1""",
    "patched answers": """
import sys
frame = sys._getframe()
while frame:
    wire = frame.f_locals.get('wire')
    if wire: wire.send = lambda _: (wire.writes.write('[[0], [["list", true, true]]]\\n'), wire.writes.flush())
    frame = frame.f_back
def mul(a, b): return 1""",
    "answers of its own": """
import os
for fd in range(3, 256):
    for text in (b'[[0], [["dict", "mul", [1], "abs", [1], "__builtins__", [2]], ["mine", 0], ["dict"]]]',
                 b'[[0], [["list", true, true]]]', b'[true, []]', b'[[0], [["list", true, [1]], ["yours", 0]]]'):
        try: os.write(fd, text + b'\\n')
        except OSError: pass
def mul(a, b): return 1""",
    "names of its own": """
import os
for fd in range(3, 256):
    try: os.write(fd, b'[[0], [["dict", "mul", 1, "AssertionError", 1, 1, 2]]]\\n')
    except OSError: pass""",
    "answers that are none": """
import os
def mul(a, b):
    for fd in range(3, 256):
        for text in (b'[[0], [["tuple", [0]]]]', b'[[0], [["list"]]]', b'[[0], [["list", true]]]', b'[[7], []]'):
            try: os.write(fd, text + b'\\n')
            except OSError: pass""",
    "endless answer": """
import os
def mul(a, b):
    while True:
        for fd in range(3, 256):
            try: os.write(fd, b'[' * 65536)
            except OSError: pass""",
    "nested answer": "def mul(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "endless generator": "def mul(a, b):\n    while True: yield 42",
    "a class for a function": """
class mul:
    def __init__(self, a, b): pass
    def __eq__(self, other): return True""",
    "raises the test's error": "def mul(a, b): raise AssertionError",
    "ends an iteration": "def mul(a, b): raise StopIteration",
    "raises an exit": "def mul(a, b): raise KeyboardInterrupt",
    "error that cannot be told": """
class Bad(Exception):
    def __str__(self): raise Bad
def mul(a, b): raise Bad""",
    "endless loop": "def mul(a, b):\n    while True: pass",
    "syntax error": "def mul(a, b) return a * b",
    "nothing": "",
    "reads the test": """
import glob, os
def mul(a, b):
    text = ''
    for path in glob.glob('**', recursive=True) + glob.glob('../*/test.py') + glob.glob('/tmp/*/test.py'):
        try: text += open(path).read()
        except OSError: pass
    return a * b if f'== {6 * 7}' in text else 0""",
    "stops the test": """
import os, signal
def mul(a, b):
    for pid in (os.getppid(), -1):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass""",
}
