from autoshard.ir.factors import FactorKind, FactorRule

PAR,RED,PERM,NEED=FactorKind.PARALLEL,FactorKind.REDUCTION,FactorKind.PERMUTATION,FactorKind.NEED_REPLICATION
class B:
    def __init__(s): s.sizes=[];s.kinds=[];s.red=[]
    def new(s,n,k=PAR,r=""):
        if n==1: return ()
        s.sizes.append(n);s.kinds.append(k);s.red.append(r);return (len(s.sizes)-1,)
    def rule(s,ops,res): return FactorRule(tuple(map(tuple,ops)),tuple(map(tuple,res)),tuple(s.sizes),tuple(s.kinds),tuple(s.red))
def need_all(e):
    b=B(); return b.rule([[b.new(n,NEED) for n in a.shape] for a in e.inputs],[[b.new(n,NEED) for n in a.shape] for a in e.outputs])
def same(e,whole=()):
    b=B(); sh=max((a.shape for a in (*e.inputs,*e.outputs)),key=len)
    d=[b.new(n,NEED if i in whole else PAR) for i,n in enumerate(sh)]
    return b.rule([d if a.shape==sh else [() for _ in a.shape] for a in e.inputs],[d if a.shape==sh else [() for _ in a.shape] for a in e.outputs])
def factor_rule(e):
    import autoshard.costmodel.primitives as P
    n=e.name; p=e.params; I=[a.shape for a in e.inputs]; O=[a.shape for a in e.outputs]
    b=B()
    if n in P.ELEMENTWISE or n in P.TRANSCENDENTAL or n in('convert_element_type','select_n','clamp','stop_gradient','copy','copy_p','reduce_precision','sharding_constraint','erf_inv','add_any','rem','nextafter','random_wrap','bitcast_convert_type','integer_pow','square'):
        if all(len(s)==len(O[0]) or s==() for s in I):
            F=[b.new(k) for k in O[0]]
            return b.rule([[F[d] if k>1 else () for d,k in enumerate(s)] for s in I],[F]*len(O))
        return need_all(e)
    if n=='optimization_barrier':
        ds=[[b.new(k) for k in s] for s in I]; return b.rule(ds,ds)
    if n=='dot_general':
        (lc,rc),(lb,rb)=p['dimension_numbers']; L=[None]*len(I[0]);R=[None]*len(I[1]);out=[]
        for x,y in zip(lb,rb): L[x]=R[y]=b.new(I[0][x]); out.append(L[x])
        for x,y in zip(lc,rc): L[x]=R[y]=b.new(I[0][x],RED,"add")
        for d in range(len(L)):
            if L[d] is None: L[d]=b.new(I[0][d]); out.append(L[d])
        for d in range(len(R)):
            if R[d] is None: R[d]=b.new(I[1][d]); out.append(R[d])
        return b.rule([L,R],[out])
    if n.startswith('reduce_') and 'axes' in p and n!='reduce_precision':
        r={'reduce_sum':'add','reduce_prod':'mul'}.get(n,n[7:])
        F=[b.new(s,RED if d in p['axes'] else PAR,r if d in p['axes'] else "") for d,s in enumerate(I[0])]
        return b.rule([F]*len(I),[[f for d,f in enumerate(F) if d not in p['axes']]]*len(O))
    if n in('argmax','argmin'):
        F=[b.new(s,NEED if d in p['axes'] else PAR) for d,s in enumerate(I[0])]
        return b.rule([F],[[f for d,f in enumerate(F) if d not in p['axes']]])
    if n=='broadcast_in_dim':
        F=[b.new(s) for s in O[0]]; bd=p['broadcast_dimensions']
        return b.rule([[F[d] if s>1 else () for d,s in zip(bd,I[0])]]+[[] for _ in I[1:]],[F])
    if n=='transpose':
        F=[b.new(s) for s in I[0]]; return b.rule([F],[[F[d] for d in p['permutation']]])
    if n in('squeeze','expand_dims','reshape') and len(I)==1:
        i=[list(()) for _ in I[0]]; o=[[] for _ in O[0]]
        a,c=0,0; sa=list(I[0]); so=list(O[0]); ia=ic=0; ra=sa[0] if sa else 1; rc=so[0] if so else 1
        # walk from the major side, splitting by gcd
        while ia<len(sa) and ic<len(so):
            if ra==1: ia+=1; ra=sa[ia] if ia<len(sa) else 1; continue
            if rc==1: ic+=1; rc=so[ic] if ic<len(so) else 1; continue
            g=ra if rc%ra==0 else rc if ra%rc==0 else None
            if g is None: return need_all(e)
            f=b.new(g); i[ia]+=list(f); o[ic]+=list(f); ra//=g; rc//=g
        return b.rule([list(map(tuple,i))],[list(map(tuple,o))])
    if n in('iota','random_bits','rng_uniform','random_seed'):
        return b.rule([[b.new(k,NEED) for k in s] for s in I],[[b.new(k) for k in s] for s in O])
    if n=='concatenate':
        d0=p['dimension']; F=[None if d==d0 else b.new(s) for d,s in enumerate(O[0])]
        return b.rule([[b.new(s[d],NEED) if d==d0 else F[d] for d in range(len(s))] for s in I],[[b.new(O[0][d],NEED) if d==d0 else F[d] for d in range(len(O[0]))]])
    if n in('slice','pad','dynamic_slice','rev'):
        ops=[];res=[]
        for d,(x,y) in enumerate(zip(I[0],O[0])):
            whole = x==y and not(n=='rev' and d in p['dimensions'])
            if whole: f=b.new(x); ops.append(f);res.append(f)
            else: ops.append(b.new(x,NEED));res.append(b.new(y,NEED))
        return b.rule([ops]+[[] for _ in I[1:]],[res])
    if n=='dynamic_update_slice':
        F=[];U=[]
        for x,u in zip(I[0],I[1]):
            if x==u: f=b.new(x);F.append(f);U.append(f)
            else: F.append(b.new(x,NEED));U.append(b.new(u,NEED))
        return b.rule([F,U]+[[] for _ in I[2:]],[F])
    if n in('cumsum','cumprod','cummax','cummin','cumlogsumexp'): return same(e,(p['axis'],))
    if n=='sort': return same(e,(p['dimension'],))
    if n=='top_k':
        ax=p.get('axis',len(I[0])-1); F=[b.new(s,NEED if d==ax else PAR) for d,s in enumerate(I[0])]
        R=[b.new(s,NEED) if d==ax else F[d] for d,s in enumerate(O[0])]; return b.rule([F],[R]*len(O))
    if n=='split':
        ax=p['axis']; F=[b.new(s,NEED if d==ax else PAR) for d,s in enumerate(I[0])]
        return b.rule([F],[[b.new(s,NEED) if d==ax else F[d] for d,s in enumerate(o)] for o in O])
    if n=='gather':
        dn=p['dimension_numbers']; ss=p['slice_sizes']
        idx=[b.new(s) for s in I[1][:-1]]+[b.new(I[1][-1],NEED)]
        op=[None]*len(I[0])
        for d,i in zip(dn.operand_batching_dims,dn.start_indices_batching_dims): op[d]=idx[i]
        off=[]
        for d in range(len(op)):
            if op[d] is not None: continue
            if d in dn.collapsed_slice_dims: op[d]=b.new(I[0][d],NEED); continue
            if ss[d]==I[0][d]: op[d]=b.new(I[0][d]); off.append(op[d])
            else: op[d]=b.new(I[0][d],NEED); off.append(b.new(ss[d],NEED))
        it=iter(off); ib=iter(idx[:-1]); out=[next(it) if d in dn.offset_dims else next(ib) for d in range(len(O[0]))]
        return b.rule([op,idx],[out])
    if n.startswith('scatter'):
        dn=p['dimension_numbers']; add=n in('scatter-add','scatter_add')
        K,R=(RED,"add") if add else (NEED,"")
        idx=[b.new(s,K,R) if i not in dn.scatter_indices_batching_dims else b.new(s) for i,s in enumerate(I[1][:-1])]+[b.new(I[1][-1],NEED)]
        op=[None]*len(I[0])
        for d,i in zip(dn.operand_batching_dims,dn.scatter_indices_batching_dims): op[d]=idx[i]
        win=[d for d in range(len(op)) if d not in dn.inserted_window_dims and d not in dn.operand_batching_dims]
        upd=[None]*len(I[2])
        for d,w in zip(win,dn.update_window_dims):
            if I[2][w]==I[0][d]: op[d]=upd[w]=b.new(I[0][d])
            else: op[d]=b.new(I[0][d],NEED); upd[w]=b.new(I[2][w],NEED)
        for d in range(len(op)):
            if op[d] is None: op[d]=b.new(I[0][d],NEED)
        ib=iter(idx[:-1])
        upd=[u if u is not None else next(ib) for u in upd]
        return b.rule([op,idx,upd],[op])
    if n=='conv_general_dilated':
        dn=p['dimension_numbers']; l,r,o=dn.lhs_spec,dn.rhs_spec,dn.out_spec
        L=[None]*len(I[0]);R=[None]*len(I[1]);U=[None]*len(O[0])
        if p['batch_group_count']==1 :
            L[l[0]]=U[o[0]]=b.new(I[0][l[0]])
        if p['feature_group_count']==1 and p['batch_group_count']==1:
            L[l[1]]=R[r[1]]=b.new(I[0][l[1]],RED,"add"); R[r[0]]=U[o[1]]=b.new(O[0][o[1]])
        for X,S in ((L,I[0]),(R,I[1]),(U,O[0])):
            for d in range(len(X)):
                if X[d] is None: X[d]=b.new(S[d],NEED)
        return b.rule([L,R],[U])
    if n in('cholesky','fft','lu','householder_product','qr','eigh','svd','triangular_solve'):
        k=2 if n!='fft' else len(p['fft_lengths']); batch=I[0][:-k]
        F=[b.new(s) for s in batch]
        f=lambda s:[*F,*(b.new(x,NEED) for x in s[len(batch):])] if len(s)>=len(batch) else [b.new(x,NEED) for x in s]
        return b.rule([f(s) for s in I],[f(s) for s in O])
    return need_all(e)
