"""Names of whole numbers below 10⁹ in twelve languages, from rules of grammar alone.

The oracle for `attnlib.data.number_words`, which takes its names from num2words. Where a
language allows two spellings, these functions use that of num2words.
"""


def words(text):
    return text.split()


def english(n):
    ones = words(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen "
        "fourteen fifteen sixteen seventeen eighteen nineteen"
    )
    tens = words("_ _ twenty thirty forty fifty sixty seventy eighty ninety")
    if n < 20:
        return ones[n]
    if n < 100:
        return tens[n // 10] + ("-" + ones[n % 10] if n % 10 else "")
    for size, name in ((10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if n >= size:
            head, rest = f"{english(n // size)} {name}", n % size
            if rest == 0:
                return head
            return head + (" and " if rest < 100 or size == 100 else ", ") + english(rest)


def german(n, one="eins"):
    ones = words(
        "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn "
        "vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn"
    )
    tens = words("_ _ zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
    if n == 1:
        return one
    if n < 20:
        return ones[n]
    if n < 100:
        return (german(n % 10, "ein") + "und" if n % 10 else "") + tens[n // 10]
    for size, name in ((1000, "tausend"), (100, "hundert")):
        if size <= n < 1000 * size and n < 10**6:
            rest = n % size
            return german(n // size, "ein") + name + (german(rest, one) if rest else "")
    millions, rest = divmod(n, 10**6)
    noun = "Million" if millions == 1 else "Millionen"
    return f"{german(millions, 'eine')} {noun}" + (f" {german(rest)}" if rest else "")


def dutch(n):
    ones = words(
        "nul één twee drie vier vijf zes zeven acht negen tien elf twaalf dertien "
        "veertien vijftien zestien zeventien achttien negentien"
    )
    tens = words("_ _ twintig dertig veertig vijftig zestig zeventig tachtig negentig")
    if n < 20:
        return ones[n]
    if n < 100:
        one, ten = n % 10, tens[n // 10]
        if one == 0:
            return ten
        return ("een" if one == 1 else ones[one]) + ("ën" if one in (2, 3) else "en") + ten
    for size, name in ((1000, "duizend"), (100, "honderd")):
        if size <= n < 10**6:
            count, rest = divmod(n, size)
            return (dutch(count) if count > 1 else "") + name + (dutch(rest) if rest else "")
    count, rest = divmod(n, 10**6)
    return (
        ("een" if count == 1 else dutch(count))
        + " miljoen"
        + (" " + dutch(rest) if rest else "")
    )


def swedish(n):
    ones = words(
        "noll ett två tre fyra fem sex sju åtta nio tio elva tolv tretton fjorton "
        "femton sexton sjutton arton nitton"
    )
    tens = words("_ _ tjugo trettio fyrtio femtio sextio sjuttio åttio nittio")
    if n < 20:
        return ones[n]
    if n < 100:
        return tens[n // 10] + (ones[n % 10] if n % 10 else "")
    if n < 1000:
        return ones[n // 100] + "hundra" + (swedish(n % 100) if n % 100 else "")
    if n < 10**6:
        count, rest = divmod(n, 1000)
        head = swedish(count)
        head = head.removesuffix("t") + "tusen" if head.endswith("tt") else head + "tusen"
        return head + ((" " if rest >= 100 else "") + swedish(rest) if rest else "")
    count, rest = divmod(n, 10**6)
    head = "en miljon" if count == 1 else swedish(count) + " miljoner"
    return head + (" " + swedish(rest) if rest else "")


def danish(n):
    ones = words(
        "nul et to tre fire fem seks syv otte ni ti elleve tolv tretten fjorten "
        "femten seksten sytten atten nitten"
    )
    tens = words("_ _ tyve tredive fyrre halvtreds tres halvfjerds firs halvfems")
    if n < 20:
        return ones[n]
    if n < 100:
        one = "en" if n % 10 == 1 else ones[n % 10]
        return (one + "og" if n % 10 else "") + tens[n // 10]
    if n < 1000:
        return ones[n // 100] + "hundrede" + (" og " + danish(n % 100) if n % 100 else "")
    if n < 10**6:
        count, rest = divmod(n, 1000)
        return danish(count) + ("tusinde og " + danish(rest) if rest else "tusind")
    count, rest = divmod(n, 10**6)
    if count == 1:
        head = "en million"
    elif count % 100 == 1:  # million is of common gender
        head = danish(count).removesuffix("et") + "en millioner"
    else:
        head = danish(count) + " millioner"
    return head + (" " + danish(rest) if rest else "")


def spanish(n, one="uno"):
    ones = words(
        "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece "
        "catorce quince dieciséis diecisiete dieciocho diecinueve veinte veintiuno "
        "veintidós veintitrés veinticuatro veinticinco veintiséis veintisiete "
        "veintiocho veintinueve"
    )
    tens = words("_ _ _ treinta cuarenta cincuenta sesenta setenta ochenta noventa")
    hundreds = words(
        "_ ciento doscientos trescientos cuatrocientos quinientos seiscientos "
        "setecientos ochocientos novecientos"
    )
    if n == 1:
        return one
    if n == 21 and one == "un":
        return "veintiún"
    if n < 30:
        return ones[n]
    if n < 100:
        return tens[n // 10] + (" y " + spanish(n % 10, one) if n % 10 else "")
    if n == 100:
        return "cien"
    if n < 1000:
        return hundreds[n // 100] + (" " + spanish(n % 100, one) if n % 100 else "")
    if n < 10**6:
        count, rest = divmod(n, 1000)
        head = "mil" if count == 1 else spanish(count, "un") + " mil"
    else:
        count, rest = divmod(n, 10**6)
        head = "un millón" if count == 1 else spanish(count, "un") + " millones"
    return head + (" " + spanish(rest) if rest else "")


def italian(n, last=True):
    ones = words(
        "zero uno due tre quattro cinque sei sette otto nove dieci undici dodici "
        "tredici quattordici quindici sedici diciassette diciotto diciannove"
    )
    tens = words("_ _ venti trenta quaranta cinquanta sessanta settanta ottanta novanta")
    if n < 20:
        return ones[n]

    def tail(rest):
        if rest == 0:
            return ""
        name = italian(rest, last)
        return name[:-1] + "é" if rest == 3 and last else name

    if n < 100:
        ten = tens[n // 10]
        return (ten[:-1] if n % 10 in (1, 8) else ten) + tail(n % 10)
    if n < 1000:
        count, rest = divmod(n, 100)
        head = ("" if count == 1 else ones[count]) + "cento"
        if rest // 10 == 8 or rest == 8:
            head = head[:-1]
        return head + tail(rest)
    if n < 10**6:
        count, rest = divmod(n, 1000)
        return ("mille" if count == 1 else italian(count, False) + "mila") + tail(rest)
    count, rest = divmod(n, 10**6)
    head = "un milione" if count == 1 else italian(count) + " milioni"
    return head + (" e " + italian(rest) if rest else "")


def portuguese(n):
    ones = words(
        "zero um dois três quatro cinco seis sete oito nove dez onze doze treze "
        "catorze quinze dezasseis dezassete dezoito dezanove"
    )
    tens = words("_ _ vinte trinta quarenta cinquenta sessenta setenta oitenta noventa")
    hundreds = words(
        "_ cento duzentos trezentos quatrocentos quinhentos seiscentos setecentos "
        "oitocentos novecentos"
    )
    if n < 20:
        return ones[n]
    if n < 100:
        return tens[n // 10] + (" e " + ones[n % 10] if n % 10 else "")
    if n == 100:
        return "cem"
    if n < 1000:
        return hundreds[n // 100] + (" e " + portuguese(n % 100) if n % 100 else "")
    if n < 10**6:
        count, rest = divmod(n, 1000)
        head = "mil" if count == 1 else portuguese(count) + " mil"
        joined = rest < 100 or rest % 100 == 0
    else:
        count, rest = divmod(n, 10**6)
        head = "um milhão" if count == 1 else portuguese(count) + " milhões"
        joined = (
            rest < 100
            or (rest < 1000 and rest % 100 == 0)
            or (rest % 1000 == 0 and (rest < 10**5 or rest % 10**5 == 0))
        )
    return head + ((" e " if joined else " ") + portuguese(rest) if rest else "")


def polish(n):
    ones = words(
        "zero jeden dwa trzy cztery pięć sześć siedem osiem dziewięć dziesięć "
        "jedenaście dwanaście trzynaście czternaście piętnaście szesnaście "
        "siedemnaście osiemnaście dziewiętnaście"
    )
    tens = words(
        "_ _ dwadzieścia trzydzieści czterdzieści pięćdziesiąt sześćdziesiąt "
        "siedemdziesiąt osiemdziesiąt dziewięćdziesiąt"
    )
    hundreds = words(
        "_ sto dwieście trzysta czterysta pięćset sześćset siedemset osiemset dziewięćset"
    )
    if n < 20:
        return ones[n]
    if n < 100:
        head, rest = tens[n // 10], n % 10
    elif n < 1000:
        head, rest = hundreds[n // 100], n % 100
    else:
        forms = (
            words("tysiąc tysiące tysięcy") if n < 10**6 else words("milion miliony milionów")
        )
        count, rest = divmod(n, 1000 if n < 10**6 else 10**6)
        few = count % 10 in (2, 3, 4) and count % 100 not in (12, 13, 14)
        head = forms[0] if count == 1 else f"{polish(count)} {forms[1 if few else 2]}"
    return head + (" " + polish(rest) if rest else "")


def finnish(n):
    ones = words(
        "nolla yksi kaksi kolme neljä viisi kuusi seitsemän kahdeksan yhdeksän kymmenen"
    )
    if n <= 10:
        return ones[n]
    if n < 20:
        return ones[n - 10] + "toista"
    if n < 100:
        return ones[n // 10] + "kymmentä" + (ones[n % 10] if n % 10 else "")
    if n < 1000:
        count, rest = divmod(n, 100)
        head = "sata" if count == 1 else ones[count] + "sataa"
        return head + (finnish(rest) if rest else "")
    if n < 10**6:
        count, rest = divmod(n, 1000)
        head = "tuhat" if count == 1 else finnish(count) + "tuhatta"
    else:
        count, rest = divmod(n, 10**6)
        head = "miljoona" if count == 1 else finnish(count) + " miljoonaa"
    return head + (" " + finnish(rest) if rest else "")


def hungarian(n, two="kettő"):
    ones = words("nulla egy kettő három négy öt hat hét nyolc kilenc")
    tens = words("_ tíz húsz harminc negyven ötven hatvan hetven nyolcvan kilencven")
    if n == 2:
        return two
    if n < 10:
        return ones[n]
    if n < 100:
        ten = tens[n // 10]
        if n % 10 and n < 30:
            ten = {"tíz": "tizen", "húsz": "huszon"}[ten]
        return ten + (hungarian(n % 10, two) if n % 10 else "")
    if n < 1000:
        count, rest = divmod(n, 100)
        head = ("" if count == 1 else hungarian(count, "két")) + "száz"
        return head + (hungarian(rest, two) if rest else "")
    size, name = (1000, "ezer") if n < 10**6 else (10**6, "millió")
    count, rest = divmod(n, size)
    head = ("" if n < 2000 else hungarian(count, "két")) + name
    return head + (("" if n < 2000 else "-") + hungarian(rest) if rest else "")


def turkish(n):
    ones = words("sıfır bir iki üç dört beş altı yedi sekiz dokuz")
    tens = words("_ on yirmi otuz kırk elli altmış yetmiş seksen doksan")
    if n < 10:
        return ones[n]
    if n < 100:
        return tens[n // 10] + (ones[n % 10] if n % 10 else "")
    for size, name in ((10**6, "milyon"), (1000, "bin"), (100, "yüz")):
        if n >= size:
            count, rest = divmod(n, size)
            head = "" if count == 1 and size < 10**6 else turkish(count)
            return head + name + (turkish(rest) if rest else "")


RULES = dict(
    en=english,
    de=german,
    nl=dutch,
    sv=swedish,
    da=danish,
    es=spanish,
    it=italian,
    pt=portuguese,
    pl=polish,
    fi=finnish,
    hu=hungarian,
    tr=turkish,
)
