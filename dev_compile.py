import sys,time
import triton, torch
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from nstf.kernels.formats.tree import Node, format_of
from nstf.kernels.triton.packed import layout_of
from nstf.kernels.triton.spec import hollow
from nstf.kernels.triton import wgmma as W
import os; PRE=os.environ.get("PRE","wg")
def leaf(k,**p): return Node(k, format_of(k).Params(**p))
T={**{f"int{b}":leaf("int",bits=b,group=128) for b in range(2,9)},"int4z":leaf("int",bits=4,group=64,symmetric=False),"int4g32":leaf("int",bits=4,group=32),"int8row":leaf("int",bits=8,group=0),"fp8":leaf("fp8"),"mxfp4":leaf("mxfp4"),"grid":leaf("grid",group=64),"int4row":leaf("int",bits=4,group=0)}
def comp(name,batch,dtype=torch.bfloat16,tile=None):
    lay=layout_of(hollow(T[name],(4096,4096)))
    s=W.wgmma_specs(lay,batch,dtype,"sm_90",tile=tile)[0]; K=s.fn
    full={}; attrs={}
    for i,p in enumerate(K.params):
        if p.name in s.constants: full[p.name]="constexpr"
        else:
            full[p.name]=s.signature[p.name]
            if p.name in s.divisible: attrs[(i,)]=[["tt.divisibility",16]]
    src=GluonASTSource(K,full,{(K.arg_names.index(n),):v for n,v in s.constants.items()},attrs)
    return s,triton.compile(src,target=GPUTarget("cuda",90,32),options=dict(num_warps=s.num_warps,num_stages=1,**s.options))
if __name__=="__main__":
    for n in (sys.argv[1].split(",") if len(sys.argv)>1 else T):
        for b in (64,256):
          for dt in (torch.bfloat16,torch.float16) if n in("int4","int8","grid") else (torch.bfloat16,):
            t=time.time()
            try: s,k=comp(n,b,dt); open(f"/tmp/t3/{PRE}_{n}_{b}_{str(dt)[6:]}.ptx","w").write(k.asm["ptx"]); print(n,b,dt,k.metadata.shared,round(time.time()-t,1),flush=True)
            except Exception as ex: print(n,b,dt,"FAIL",str(ex)[-300:],"CAUSE",str(ex.__cause__)[-600:], str(getattr(ex.__cause__,"__cause__",""))[-300:])
